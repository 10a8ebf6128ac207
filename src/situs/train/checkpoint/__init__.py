"""The run folder, its checkpoints and their files."""

from situs.train.checkpoint.folder import CLASSES, MARK, Checkpoint, RunFolder, check_target, read_config, run_and_step

__all__ = ["CLASSES", "MARK", "Checkpoint", "RunFolder", "check_target", "read_config", "run_and_step"]
