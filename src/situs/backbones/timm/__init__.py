"""timm's models behind the interface: how they are made, run and laid out."""
