"""The front end: from an nn.Module to a Program, one graph per module."""
