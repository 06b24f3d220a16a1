"""MkDocs hooks: show files of the repository's root as pages, and unlink files that the site does not show."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Pages of the site and the files of the repository's root that they show.
_ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
# A Markdown link to a path: not to an address, and not within the page.
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>(?!\w+:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that show files of the repository's root."""
    root = Path(config.config_file_path).parent
    for page, source in _ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links of `markdown` from paths in the repository to pages of the site.

    A link to a file that the site does not show keeps its text and loses its target: the text names the file. A link to
    a page that does not exist stays, so that the strict build fails on it.
    """
    root_pages = {source: target for target, source in _ROOT_PAGES.items()}
    in_root = page.file.src_uri in _ROOT_PAGES
    folder = "" if in_root else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewritten(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["path"]))
        if path in root_pages:
            target = root_pages[path]
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        else:
            return match["text"]
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"[{match['text']}]({posixpath.relpath(target, here)}{match['anchor'] or ''})"

    return _LINK.sub(rewritten, markdown)
