"""What gradients of a model of words give away of sentences: the words, their order, and which sentence they are of."""
