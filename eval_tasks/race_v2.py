"""Functions of race_v2.yaml: version 3 of the task fills the blank of an earlier question, version 2 kept it alone."""

from lm_eval.tasks.race.preprocess_race import (
    doc_to_choice,
    doc_to_target,
    get_answer_option,
    last_problem,
    process_ast,
)

BLANK = '  _  .'


def doc_to_text(doc):
    lines = [f'Article: {doc["article"]}\n']
    for problem in process_ast(doc['problems'])[:-1]:
        question = problem['question']
        answer = get_answer_option(problem)
        if question.endswith(BLANK):
            lines.append(BLANK[1:] + answer)
        else:
            lines.append(f'Question: {question}\nAnswer: {answer}')
    return '\n'.join([*lines, last_problem(doc)['question']])


__all__ = ['doc_to_choice', 'doc_to_target', 'doc_to_text']
