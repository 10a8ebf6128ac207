"""What a model knows of position, asked in four ways.

head        a run's own position head: how often it names the place of a patch (DropPos's grid, MP3's curve)
vectors     the vectors that stand for the places: spectrum, and what a linear map reads off them
dropped     a linear classifier on the final features of patches without a position (DropPos, Table 7)
knowledge   all of it in one verdict: vectors, features at every depth (`readers`), answers, blocks
"""
