"""What a server learns of the samples whose tokens it computes on (SPEC §7)."""
