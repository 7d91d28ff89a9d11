"""Lets torchvision be imported beside a CPU build of torch. First on PYTHONPATH of every engine process.

SGLang imports transformers, and transformers imports torchvision. torchvision's published wheel carries
its operators in a library linked against CUDA. Beside a CPU torch that library does not load, quietly, and
the import then dies where torchvision registers the shape functions of two operators that nobody
declared: "operator torchvision::nms does not exist". Declaring the two is all it needs; nothing in a KV
cache calls them. Where the real library does load, a second declaration would be an error, so the shim
stays out of the way of a torch that was built with CUDA.
"""

from __future__ import annotations

import torch

if torch.version.cuda is None:
    #: Kept: the declarations vanish with the object that made them.
    torchvision_schemas = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        torchvision_schemas.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
