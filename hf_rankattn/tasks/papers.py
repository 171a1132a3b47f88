"""Whose tasks these are."""

BENEFITS = """@misc{amsel2024benefits,
  title = {On the Benefits of Rank in Attention Layers},
  author = {Noah Amsel and Gilad Yehudai and Joan Bruna},
  year = {2024},
  eprint = {2407.16153},
  archivePrefix = {arXiv}
}"""
COLLAPSE = """@misc{dong2021attention,
  title = {Attention is Not All You Need: Pure Attention Loses Rank Doubly Exponentially with Depth},
  author = {Yihe Dong and Jean-Baptiste Cordonnier and Andreas Loukas},
  year = {2021},
  eprint = {2103.03404},
  archivePrefix = {arXiv}
}"""
