"""What runs when a user calls an optimized model: captured modules, guards, state maps; no compiler."""
