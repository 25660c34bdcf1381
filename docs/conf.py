"""How `make docs` makes a site of the pages.

Sphinx's source folder is the root of the repository, so that the relative links between README.md,
docs/ and benchmarks/ lead to the same pages here as on GitHub.
"""

from importlib.metadata import version as version_of

from sphinx.application import Sphinx

project = "p2p-kv-engine"
version = release = version_of(project)

extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "csrc", "dist", "mempool", "p2p_engine", "proxy", "tests"]
root_doc = "docs/index"
myst_heading_anchors = 4
highlight_language = "text"

html_theme = "furo"
html_title = project
html_extra_path = ["site"]  # the site's own index.html, which leads to docs/index.html

CONTENTS = """
```{toctree}
:glob:
:hidden:

/README
/docs/getting_started
/docs/configuration
/docs/proxy
*
/ARCHITECTURE
/benchmarks/README
/CONTRIBUTING
/CHANGELOG
```
"""


def _add_contents(app: Sphinx, name: str, text: list[str]) -> None:
    """Add what Sphinx makes its sidebar of, and GitHub would show as it is."""
    if name == root_doc:
        text[0] += CONTENTS


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _add_contents)
