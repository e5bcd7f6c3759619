"""The Responses API at the gateway: stored responses, and the replica that stores each."""
