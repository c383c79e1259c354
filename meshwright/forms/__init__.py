"""Forms: answers to questions that a plan asks of each parameter, one file each, in a folder a
question. They import `meshwright.ir` and torch alone; models of cost, codegen and runtime use them.
"""
