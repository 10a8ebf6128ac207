"""Constants that torch code and Triton kernels share."""

import math

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_B = 0x94D049BB133111EB - (1 << 64)
"""Of Steele, Lea & Flood's SplitMix64, as signed 64-bit integers."""

SLOPE = 0.3275911 / math.sqrt(2)
TAIL = tuple(0.5 * a for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
EXPONENT = -0.5 * math.log2(math.e)
"""exp(-z²/2) is 2 to the power of this times z²."""
DENSITY = 1 / math.sqrt(2 * math.pi)
"""Of the normal distribution by Abramowitz and Stegun's 7.1.26, see `kernels.mlp`."""
