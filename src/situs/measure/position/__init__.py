"""What a model knows of position, measured in four ways.

head        accuracy of a run's position head (DropPos's grid, MP3's curve)
vectors     the position embeddings: their spectrum, and a linear regression from them to places
dropped     a linear probe on the final features of patches without a position (DropPos, Table 7)
knowledge   all in one report: embeddings, features at every depth (`readers`), answers, blocks
"""
