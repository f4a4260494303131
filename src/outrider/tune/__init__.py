"""Does speculation pay on these prompts, with which drafter and how many tokens?"""
