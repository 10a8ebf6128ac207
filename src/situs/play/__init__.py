"""The playground: one page that holds a small model and runs it, to move patches about and see what it makes of them.

pack.py    a model as tensors in one string, and what the page must know of it
page.py    the page itself: write_playground(model, "play.html")
model.js   the transformer in plain JavaScript
board.js   the pieces, moved by mouse, touch or keys; pictures.js, where they are cut from
view.js    what is shown of an answer; lock.js, what a lock leaves of the model
play.js    puts them together; play.html.jinja and play.css say where and how
"""

from situs.play.page import Playground, write_playground

__all__ = ["Playground", "write_playground"]
