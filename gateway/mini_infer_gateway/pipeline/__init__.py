"""The request pipeline: `generate` names the stages of a request in their order, `stages` has a file for each."""
