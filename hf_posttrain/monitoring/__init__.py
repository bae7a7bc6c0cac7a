"""What a run shows while it trains: progress, symptoms of trouble, and what stops it."""
