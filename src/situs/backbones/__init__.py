"""Models behind one interface: the only package that knows timm and transformers."""

from situs.backbones.base import Backbone, Features, Stream
from situs.backbones.config import BackboneConfig
from situs.backbones.create import create_backbone

__all__ = ["Backbone", "BackboneConfig", "Features", "Stream", "create_backbone"]
