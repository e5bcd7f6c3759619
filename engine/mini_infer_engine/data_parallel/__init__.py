"""Several engines behind one port: which one gets a request, and what they tell the outside together."""
