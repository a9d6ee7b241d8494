"""All drafters, in the order in which they are asked.

`DRAFTERS` is the priority list: in each round the first enabled drafter with a non-empty draft
wins, whatever the order on the command line.
"""

from __future__ import annotations

from specdec.registry import Registry

DRAFTERS = Registry(
    "speculative type",
    {
        "ngram-simple": "specdec.drafters.ngram:build_simple",
        "ngram-map-k": "specdec.drafters.ngram:build_map_k",
        "ngram-map-k4v": "specdec.drafters.ngram:build_map_k4v",
        "ngram-mod": "specdec.drafters.ngram_mod:build",
        "ngram-cache": "specdec.drafters.ngram_cache:build",
        "draft-simple": "specdec.drafters.draft_model:build",
        "draft-eagle3": "specdec.drafters.eagle3:build",
        "draft-mtp": "specdec.drafters.mtp:build",
        "draft-dflash": "specdec.drafters.dflash:build",
        "draft-dspark": "specdec.drafters.dflash:build",
        "draft-dflash2": "specdec.drafters.dflash:build",
        "draft-lilicorr": "specdec.drafters.dflash:build",
    },
)
"""Spec type -> a function from a `DraftContext` to a `Drafter`; place = priority."""
