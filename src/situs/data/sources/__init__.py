"""Whatever a user has on disk, as numbered samples; `situs.data.open` picks the reader."""
