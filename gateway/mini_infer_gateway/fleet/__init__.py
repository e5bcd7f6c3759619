"""The endpoints as the gateway knows them now: what they hold, how busy they are, whether they are worth trying."""
