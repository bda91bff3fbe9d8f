"""Put faults into fxopt's own source, one at a time, and see whether a user would ever get a wrong model."""
