"""What rides ahead: drafters propose, and know nothing of models, rules, controllers or the engine."""
