"""Loading models and tokenizers, preparing the policy, and the frozen second models: references and teachers."""
