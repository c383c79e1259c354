"""What ddl-benchmarks measured, and the alpha-beta constants that go with it.

Rows: HKBU-HPML/ddl-benchmarks, results of 2020-05-29, samples per second on 4, 8, 16 and 32 GPUs
(RTX 2080 Ti, 4 a node). Constants: `mgwfbp/dopt.py` of lzhangbv/dear_pytorch.
"""

from benchmarks.dear.schedules import Line

GPUS = (4, 8, 16, 32)
Rows = dict[tuple[str, str], tuple[float, ...]]
"""(model, network) -> samples per second."""

WFBP: Rows = {
    ("ResNet-50", "10GbE"): (1015.40, 1795.74, 3146.78, 5113.18),
    ("ResNet-50", "IB"): (1014.28, 2017.12, 3946.06, 7326.56),
    ("BERT-Base", "10GbE"): (634.10, 582.26, 1069.48, 2013.38),
    ("BERT-Base", "IB"): (631.80, 1195.68, 2217.22, 4098.68),
    ("BERT-Large", "10GbE"): (56.04, 29.06, 53.42, 101.96),
    ("BERT-Large", "IB"): (56.30, 101.68, 185.42, 339.82),
}
MG_WFBP: Rows = {
    ("ResNet-50", "10GbE"): (1003.18, 1980.58, 3784.98, 6883.60),
    ("ResNet-50", "IB"): (1003.90, 2001.72, 3987.40, 7876.46),
    ("BERT-Base", "10GbE"): (659.06, 611.44, 1153.18, 1925.78),
    ("BERT-Base", "IB"): (660.42, 1235.04, 2515.30, 4940.08),
    ("BERT-Large", "10GbE"): (57.34, 30.04, 54.26, 105.02),
    ("BERT-Large", "IB"): (57.50, 106.78, 205.78, 400.16),
}
BSP: Rows = {
    ("ResNet-50", "10GbE"): (925.02, 1282.28, 2485.12, 4920.82),
    ("ResNet-50", "IB"): (920.28, 1821.20, 3602.90, 7126.52),
    ("BERT-Base", "10GbE"): (555.52, 518.94, 984.88, 1926.64),
    ("BERT-Base", "IB"): (555.70, 1082.42, 2112.96, 4184.38),
    ("BERT-Large", "10GbE"): (53.04, 28.96, 54.30, 105.10),
    ("BERT-Large", "IB"): (53.08, 99.18, 191.64, 375.22),
}
"""One all-reduce after the backward, nothing overlapped: for calibration."""

TABLE = {
    "10GbE": {
        4: Line(4.204e-5, 2.059e-10), 8: Line(5.230e-4, 8.571e-10),
        16: Line(9.081e-4, 7.396e-10), 32: Line(3 * 1.3476e-3, 8.643e-10),
        64: Line(3 * 2.3476e-3, 9.643e-10),
    },
    "IB": {
        4: Line(4.204e-5, 2.059e-10), 8: Line(9.754e-5, 3.057e-10),
        16: Line(3 * 2.358e-4, 4.059e-10), 32: Line(4.063e-4, 1.5 * 3.271e-10),
        64: Line(8.063e-4, 1.8 * 3.271e-10),
    },
}  # fmt: skip
"""As the code uses them; the factors 3, 1.5 and 1.8 are written there by hand."""
ALPHA_S = {
    "10GbE": {4: 4.204e-5, 8: 5.230e-4, 16: 9.081e-4, 32: 1.3476e-3, 64: 2.3476e-3},
    "IB": {4: 4.204e-5, 8: 9.754e-5, 16: 2.358e-4, 32: 4.063e-4, 64: 8.063e-4},
}
"""The same without those factors: as measured."""
