"""Grouped-query attention with optional QK norm and rotary embedding: its templates, oracle and baselines.

The order is the order of preference of the default plan: the fused projection, then library parts, because these are
sound on any card; tuning finds what is faster.
"""

from tilewright.kernel_templates.families import Family
from tilewright.kernel_templates.gqa_attention import (
    baselines,
    flash_attention,
    gluon_attention,
    gluon_output,
    gluon_qkv,
    library_attention,
    library_gemm,
    norm_rope,
    output_projection,
    qkv_norm_rope,
    qkv_projection,
    reference,
)
from tilewright.kernel_templates.plan import Registry

TEMPLATES = (
    qkv_norm_rope.TEMPLATE,
    library_gemm.QKV,
    qkv_projection.TEMPLATE,
    norm_rope.TEMPLATE,
    library_attention.SDPA_OUTPUT,
    library_attention.SDPA,
    flash_attention.TEMPLATE,
    library_gemm.OUTPUT,
    output_projection.TEMPLATE,
    gluon_qkv.TEMPLATE,
    gluon_output.TEMPLATE,
    gluon_attention.TEMPLATE,
)
FAMILY = Family(
    Registry(TEMPLATES), reference.OPS, baselines.BASELINES, final_baselines=("torch_compile", "cublas_cudnn")
)
