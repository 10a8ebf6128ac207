"""The patch embedding's equations under noise, by one who knows what photographs and gradients are like."""
