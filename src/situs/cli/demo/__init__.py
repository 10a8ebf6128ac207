"""`situs demo`: a tour on the embedded images, as one page."""
