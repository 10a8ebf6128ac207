"""How a set is packed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from situs.config import Checked
from situs.errors import SitusError
from situs.limits import Count, Natural, Positive, Within


@dataclass(frozen=True, kw_only=True)
class PackConfig(Checked):
    """What becomes of each image, and how the shards are cut."""

    format: Literal["parquet", "webdataset"] = "parquet"
    """Hugging Face parquet (image, label, class names inside), or tar files with a classes.txt beside them."""

    short_side: Natural = 256
    """Images whose shorter side is longer are shrunk to it; the others keep their bytes. 0: all keep them."""

    encoding: Literal["jpeg", "png"] = "jpeg"
    """What a shrunk image is written as: JPEG, or PNG without loss. Images deeper than 8 bits keep 16."""

    quality: Annotated[int, Within("[1, 100]")] = 90
    """Of JPEG."""

    channels: Count | None = None
    """Channels of a shrunk image; by default its own, without alpha (4 keeps alpha)."""

    shard_mib: Positive = 256.0
    """Largest shard, in MiB of image bytes."""

    row_group: Count = 100
    """Parquet: rows a group, which is what a reader takes at once."""

    multi_label: bool = False
    """Any number of classes an image, from a table beside the images or from parquet: a bool column a class, null where
    nobody knows. In parquet alone."""

    def check(self) -> None:
        if self.multi_label and self.format != "parquet":
            raise SitusError(
                f"format={self.format}: holds one class an image, and several go into parquet",
                field=("format", "multi_label"),
            )
        if self.row_group != PackConfig.row_group and self.format != "parquet":
            said = f"row_group={self.row_group}: is for parquet, and format={self.format} has no groups of rows"
            raise SitusError(said, field=("row_group", "format"))
        if self.quality != PackConfig.quality and (self.encoding == "png" or not self.short_side):
            why = "short_side=0 keeps the bytes of every image" if not self.short_side else "encoding=png loses nothing"
            said = f"quality={self.quality}: is for JPEG that is written here, and {why}"
            raise SitusError(said, field=("quality", "encoding" if self.short_side else "short_side"))

    def told(self) -> dict[str, Any]:
        """As the manifest and the journal hold it; what came later stands there only where it is asked for."""
        return {name: value for name, value in asdict(self).items() if name != "multi_label" or value}
