"""`situs demo`: the tour of everything on the embedded images, as one page."""
