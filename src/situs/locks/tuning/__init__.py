"""Studies of the lock: fine-tuning in four ways, and the paper's own rule for keys."""
