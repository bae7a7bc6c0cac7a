"""Before training: what a recipe would train on, and whether it fits."""
