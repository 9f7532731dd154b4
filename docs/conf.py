"""The documentation site: scripts/docs.sh builds it."""

import re
import sys
from pathlib import Path

import pullback

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "Pullback"
author = "the Pullback authors"
copyright = f"{author}, Apache-2.0"
version = release = pullback.__version__

extensions = [
    "myst_parser",
    "performance_plots",
    "sphinx-mathjax-offline",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_*", "gallery/**/*.py", "requirements.txt"]
highlight_language = "none"
default_role = "py:obj"

# ---------------------------------------------------------------- text

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3

# Files of the repository that link to each other by path are pages here.
PAGES = {
    "](../HACKING.md)": "](contributing.md)",
    "](../examples/data/README.md)": "](data.md)",
}


def link_pages(app, docname, source):
    for path, page in PAGES.items():
        source[0] = source[0].replace(path, page)


# ---------------------------------------------------------------- Python

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "ignore-module-all": True}
autodoc_inherit_docstrings = False
autodoc_mock_imports = ["transformers"]
add_module_names = False
python_maximum_signature_line_length = 80


def to_rst(app, what, name, item, options, lines):
    """Shapes may hold bars, and `AttentionOptions` is found in whatever module it is."""
    for index, line in enumerate(lines):
        line = re.sub(r"(?<![`:])`([A-Z]\w+)`", r"`.\1`", line)
        lines[index] = line.replace("|", "\\|")


def skip_fields(app, what, name, item, skip, options):
    """The fields of a NamedTuple are in its signature."""
    return True if (item.__doc__ or "").startswith("Alias for field number") else None


# ---------------------------------------------------------------- examples

sphinx_gallery_conf = {
    "examples_dirs": ["../examples/python"],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"\.py$",
    "ignore_pattern": "finetune_",  # needs Transformers and a model
    "abort_on_example_error": True,
    "run_stale_examples": True,
    "download_all_examples": False,
    "min_reported_time": 1e9,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "remove_config_comments": True,
    "within_subsection_order": "example_style.Order",
    "notebook_extensions": set(),
    "reset_modules": ("matplotlib", "example_style.reset"),
    "default_thumb_file": str(Path(__file__).parent / "_static" / "logo.svg"),
    "thumbnail_size": (400, 170),
    "image_scrapers": ("matplotlib",),
}

# ---------------------------------------------------------------- looks

html_theme = "furo"
html_title = "Pullback"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["pullback.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b6e6e",
        "color-brand-content": "#0b6e6e",
        "color-brand-visited": "#0b6e6e",
    },
    "dark_css_variables": {
        "color-brand-primary": "#4fd1c5",
        "color-brand-content": "#4fd1c5",
        "color-brand-visited": "#4fd1c5",
    },
}


def setup(app):
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("source-read", link_pages)
