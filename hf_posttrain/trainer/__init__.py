"""PostTrainer and what it needs: configuration, units of the loss, metrics, saving, checkpoints."""
