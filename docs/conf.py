"""How `make docs` makes a site of the pages.

Sphinx's source folder is the root of the repository, so that the relative links between README.md,
docs/ and benchmarks/ lead to the same pages here as on GitHub.
"""

import re
from importlib.metadata import version as version_of

from sphinx.application import Sphinx

project = "p2p-kv-engine"
version = release = version_of(project)

extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md", "benchmarks/pages/*.md"]
exclude_patterns = [".*", "build", "csrc", "dist", "mempool", "p2p_engine", "proxy", "tests"]
root_doc = "docs/index"
myst_heading_anchors = 4
highlight_language = "text"

html_theme = "furo"
html_title = project
html_extra_path = ["site"]  # the site's own index.html, which leads to docs/index.html

CONTENTS = """
```{{toctree}}
:hidden:

{pages}
```
"""

LISTS = {root_doc: r"\]\((\S+)\.md\)", "benchmarks/README": r"\]\((pages/\S+)\.md\)"}


def _add_contents(app: Sphinx, name: str, text: list[str]) -> None:
    """Make the sidebar of the links in LISTS, in their order. A page without one fails."""
    if name in LISTS:
        text[0] += CONTENTS.format(pages="\n".join(re.findall(LISTS[name], text[0])))


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _add_contents)
