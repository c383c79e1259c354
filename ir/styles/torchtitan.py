"""torchtitan with FSDP2: torch's operators one by one, or compiled where the plan says so."""

from meshwright.ir.styles import Style

STYLE = Style(
    title="torchtitan",
    beside_replicas=True,
    libraries=2024,
    balanced=True,
    variants=("halves",),
    reference="torchtitan docs/fsdp.md; wheels of torch of that time",
)
