"""Grouped-query attention with optional QK norm and rotary embedding: its templates, oracle and baselines.

The order is the order of preference of the default plan: the fused projection, then library parts, because these are
sound on any card; tuning finds what is faster.
"""

from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.gqa_attention import (
    baselines,
    flash_attention,
    library_attention,
    library_gemm,
    norm_rope,
    reference,
)
from tilewright.kernel_templates.plan import Registry

TEMPLATES = (
    library_gemm.QKV,
    norm_rope.TEMPLATE,
    library_attention.SDPA,
    library_gemm.OUTPUT,
    library_attention.SDPA_OUTPUT,
    flash_attention.TEMPLATE,
)
FAMILY = Family(
    Registry(TEMPLATES), reference.OPS, baselines.BASELINES, final_baselines=("torch_compile", "cublas_cudnn")
)
