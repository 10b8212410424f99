"""What making groups and rolling them over costs, beside LWS's DisaggregatedSet on the same control plane."""
