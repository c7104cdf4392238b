"""The site, which `make docs` builds. Pages stay where they are: their links work on a code host, too."""

import ast
import html
import inspect
import pydoc
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import generated  # noqa: E402

project = "instep"
author = "the instep authors"
html_title = "instep"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = html_copy_source = False
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*/README.md"]
exclude_patterns = [".*", "build", "runs", "dist", "instep", "tests", "examples"]
myst_enable_extensions = ["alert", "colon_fence"]
myst_heading_anchors = 4
highlight_language = "text"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
# Types of torch and Python have pages elsewhere, and nothing is fetched.
nitpick_ignore_regex = [("py:.*", r"(?!instep\.\w+$).*")]

SHOWN = {".py": "python", ".c": "c", ".toml": "toml"}
linked: set[Path] = set()


def page_of(path: Path) -> str:
    """The page with the text of a file, or with a list of the files of a folder."""
    return f"source/{path.relative_to(ROOT)}"


class SourceLinks(SphinxTransform):
    """A link to a file or a folder of the code leads to a page that shows it."""

    default_priority = 5

    def apply(self) -> None:
        for kind in (addnodes.download_reference, addnodes.pending_xref):
            for node in list(self.document.findall(kind)):
                path = Path(self.env.relfn2path(node["reftarget"].partition("#")[0], self.env.docname)[1])
                if path.is_dir() or (path.is_file() and path.suffix in SHOWN):
                    linked.add(path)
                    uri = self.app.builder.get_relative_uri(self.env.docname, page_of(path))
                    node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, object], str]]:
    """Every linked file, and every file of a linked folder."""
    todo, done = sorted(linked), set[Path]()
    trees: dict[int, str] = {}  # the sidebar is the same, links included, for all pages of one depth
    while todo:
        path = todo.pop()
        if path in done:
            continue
        done.add(path)
        if path.is_dir():
            names = [name for name in sorted(path.iterdir()) if name.is_dir() or name.suffix in SHOWN]
            names = [name for name in names if not name.name.startswith(("__pycache__", "."))]
            todo += names
            body = "".join(f"<dt>{link(path, name)}</dt><dd>{first_line(name)}</dd>" for name in names)
            body = f"<dl>{readme(app, path)}{body}</dl>"
        else:
            body = app.builder.highlighter.highlight_block(
                path.read_text(), SHOWN[path.suffix], linenos="inline", lineanchors="L", anchorlinenos=True
            )
        name, title = page_of(path), str(path.relative_to(ROOT))
        depth = name.count("/")
        if depth not in trees:
            options = {"collapse": False, "titles_only": True, "includehidden": True}
            trees[depth] = app.builder._get_local_toctree(name, **options)
        context = {"title": title, "body": f"<h1>{title}</h1>{body}", "toctree": sidebar(trees[depth])}
        yield name, context, "page.html"


def sidebar(tree: str) -> Callable[..., str]:
    return lambda **_: tree


def link(base: Path, path: Path) -> str:
    name = path.name + "/" * path.is_dir()
    return f'<a href="{relative_uri(page_of(base) + ".html", page_of(path) + ".html")}">{name}</a>'


def readme(app: Sphinx, folder: Path) -> str:
    docname = f"{folder.relative_to(ROOT)}/README"
    if docname not in app.env.found_docs:
        return ""
    uri = relative_uri(page_of(folder) + ".html", f"{docname}.html")
    return f'<dt><a href="{uri}">README.md</a></dt><dd>{html.escape(app.env.titles[docname].astext())}</dd>'


def first_line(path: Path) -> str:
    """What a module says it is, and a folder its package or its README."""
    if (readme := path / "README.md").exists():
        return html.escape(readme.read_text().splitlines()[0].strip("# "))
    file = path / "__init__.py" if path.is_dir() else path
    if file.suffix != ".py" or not file.exists():
        return ""
    line = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    return re.sub("``(.*?)``", r"<code>\1</code>", html.escape(line))


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """From a name on docs/api.md to the line that defines it."""
    found = pydoc.locate(f"{info['module']}.{info['fullname']}")
    found = found.fget if isinstance(found, property) else found
    try:
        file, line = inspect.getsourcefile(inspect.unwrap(found)), inspect.getsourcelines(found)[1]
    except (OSError, TypeError):  # an attribute, or made by a decorator
        return None
    return f"../{page_of(Path(file))}.html#L-{line}" if Path(file).is_relative_to(ROOT / "instep") else None


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Puts what is made at build into its place on a page."""
    source[0] = re.sub(
        r"<!-- made at build: (\w+) ?(.*?) -->", lambda m: generated.MADE[m[1]](m[2]), source[0]
    )


def check_links(app: Sphinx, error: Exception | None) -> None:
    """Every link of every page, also those that Sphinx has not made."""
    (app.outdir / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')
    texts = {} if error else {path.resolve(): path.read_text() for path in app.outdir.rglob("*.html")}
    names = {path: {"", *re.findall(r'\b(?:id|name)="([^"]*)"', text)} for path, text in texts.items()}
    for path, text in texts.items():
        for target in map(urlsplit, set(re.findall(r'\b(?:href|src)="([^"]*)"', text))):
            there = (path.parent / unquote(target.path)).resolve() if target.path else path
            found = there.is_file() and unquote(target.fragment) in names.get(there, {target.fragment})
            if not (found or target.scheme):
                logging.getLogger(__name__).warning(f"{path}: {target.geturl()} leads nowhere")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(SourceLinks)
    app.connect("source-read", fill)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", check_links)
    return {"parallel_read_safe": False}
