"""The figures that README quotes: each bench prints ratios measured side by side in one run."""
