"""The constants of Steele, Lea & Flood's SplitMix64, as signed 64-bit integers: for tensors and for Triton alike."""

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_B = 0x94D049BB133111EB - (1 << 64)
