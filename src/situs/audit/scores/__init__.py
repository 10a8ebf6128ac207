"""How close what was recovered comes to the originals."""
