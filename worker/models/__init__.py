"""One decoder, computed by several backends; which model it is says its `DecoderSpec` (weight_manager/families)."""
