"""Monitoring of a training run: progress, symptoms of problems, and conditions that stop the run."""
