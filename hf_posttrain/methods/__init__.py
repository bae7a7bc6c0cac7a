"""The algorithms, one file each: a Config and a Trainer."""
