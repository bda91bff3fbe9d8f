"""Show what was done: before and after, as text and as JSON."""
