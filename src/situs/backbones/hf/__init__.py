"""transformers' models behind the interface: how they are made, named, run and laid out."""
