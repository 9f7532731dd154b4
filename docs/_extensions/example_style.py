"""How the gallery looks: its order, its figures."""

import matplotlib as mpl

ORDER = (
    "attention_bias",
    "entmax_family",
    "segments_of_a_graph",
    "block_sparse_bigbird",
    "drop_in",
    "plans_in_numpy",
    "gradcheck",
)


class Order:
    """The key by which sphinx-gallery sorts; it makes one for each folder."""

    def __init__(self, folder):
        pass

    def __call__(self, filename):
        return ORDER.index(filename.removesuffix(".py"))


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
