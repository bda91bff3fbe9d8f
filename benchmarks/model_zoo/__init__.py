"""Small models of every kind with random weights, drawn by a seed; nothing is downloaded."""
