"""Loading of models and tokenizers, setup of the policy, and frozen second models (references and teachers)."""
