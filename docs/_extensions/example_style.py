"""How figures of the examples look on the site."""

import matplotlib as mpl


def reset(gallery_conf, name):
    mpl.rcParams.update(
        {
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": 11,
            "figure.dpi": 110,
            "font.size": 10,
            "legend.frameon": False,
            "savefig.dpi": 160,
            "axes.prop_cycle": mpl.cycler(
                color=["#0b6e6e", "#e07a1f", "#5b6abf", "#b8336a", "#6b8e23", "#888888"]
            ),
        }
    )
