"""The compiler core: what every pass stands on; it knows no concrete pass."""
